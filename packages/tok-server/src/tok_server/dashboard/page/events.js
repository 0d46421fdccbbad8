// Server-sent events of a fetch, which EventSource could send no key with.

const KEY = "tok-api-key";

export const keyKept = () => sessionStorage.getItem(KEY);
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const headers = () => (keyKept() ? { Authorization: `Bearer ${keyKept()}` } : {});

// Calls back with name and data of each event until the stream ends.
export async function readEvents(response, each) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let left = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (left + value).split("\n\n");
      left = blocks.pop();
      for (const found of blocks.map(parse)) if (found.data) each(found.event, found.data);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    const [, name, rest] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name === "event") found.event = rest;
    if (name === "data") found.data += rest;
  }
  return found;
}
