"""The tokenizer's text equals that of the `tokenizers` library and the concatenation of its pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer
from tok_core.errors import InvalidField, ModelError
from tok_core.text import Tokenizer, with_end_token
from tok_core.text.files import end_token_id

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab <é🙂日|>\n")
IDS = st.lists(st.integers(0, 340), max_size=30)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(directory, 512)
    return directory


_LOADED: dict[Path, tuple[Tokenizer, tokenizers.Tokenizer]] = {}


def _load(directory: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    if directory not in _LOADED:
        library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        _LOADED[directory] = (Tokenizer.load(directory), library)
    return _LOADED[directory]


def cached(directory: Path) -> Tokenizer:
    return _load(directory)[0]


def reference(directory: Path) -> tokenizers.Tokenizer:
    return _load(directory)[1]


def id_of(token: str, directory: Path) -> int:
    found = reference(directory).token_to_id(token)
    assert found is not None
    return found


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: spaces are U+2581, one is prepended; unknown characters become bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abé", "▁a", "▁▁", "ab"]
    encoder = tokenizers.Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [("▁", "a"), ("▁", "▁"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    return encoder


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer like T5's: Metaspace over a unigram vocabulary."""
    tokens = [("<unk>", 0.0), *((token, -2.0) for token in "▁abé"), ("▁a", -1.0), ("▁▁", -1.0)]
    encoder = tokenizers.Tokenizer(models.Unigram(tokens, unk_id=0, byte_fallback=False))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Metaspace()
    encoder.add_special_tokens(["<unk>"])
    return encoder


def saved(encoder: tokenizers.Tokenizer, directory: Path, config: dict[str, object] | None = None) -> Path:
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return directory


@given(TEXTS)
def test_byte_level_text_survives_encoding_and_decoding(byte_level: Path, text: str) -> None:
    tokenizer = cached(byte_level)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference(byte_level).encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.piece(token) for token in ids) == text.encode()


@given(IDS)
def test_any_byte_level_ids_decode_as_the_library_decodes_them(byte_level: Path, ids: list[int]) -> None:
    for skip in (True, False):
        assert cached(byte_level).decode(ids, skip) == reference(byte_level).decode(ids, skip)


@pytest.mark.parametrize("make", [sentencepiece_like, metaspace])
def test_sentencepiece_like_ids_decode_as_the_library_decodes_them(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    encoder = make()
    tokenizer = Tokenizer.load(saved(encoder, tmp_path))
    size = encoder.get_vocab_size()

    @given(st.lists(st.integers(0, 2) | st.integers(size - 7, size + 2), max_size=12))
    def same(ids: list[int]) -> None:
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == encoder.decode(ids, skip)

    same()


def test_byte_fallback_round_trips_any_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(sentencepiece_like(), tmp_path))

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<")))
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.pieces_of(ids)) == (" " + text if text else "").encode()

    round_trip()


def test_special_tokens_have_pieces_but_are_not_shown(byte_level: Path) -> None:
    tokenizer = cached(byte_level)
    begin, end, turn = SPECIAL_TOKENS
    assert tokenizer.bos_id == id_of(begin, byte_level)
    assert tokenizer.eos_ids == (id_of(end, byte_level),)
    assert tokenizer.special_ids == {id_of(token, byte_level) for token in SPECIAL_TOKENS}
    assert tokenizer.piece(id_of(turn, byte_level)) == turn.encode()
    assert tokenizer.encode("a") == [tokenizer.bos_id, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("a" + turn)) == "a"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: Path) -> None:
    tokenizer = cached(byte_level)
    assert tokenizer.vocab_size == len(tokenizer.pieces) == reference(byte_level).get_vocab_size()
    assert tokenizer.piece(tokenizer.vocab_size) == tokenizer.piece(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size, -1]) == ""


def test_a_batch_encodes_as_its_texts_do(byte_level: Path) -> None:
    tokenizer = cached(byte_level)
    texts = ["", "one", "naïve 🙂 café"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_truncation_and_padding_in_the_file_do_not_change_prompts(tmp_path: Path) -> None:
    encoder = sentencepiece_like()
    encoder.enable_truncation(2)
    encoder.enable_padding(length=50)
    ids = Tokenizer.load(saved(encoder, tmp_path)).encode("b" * 9)
    assert len(ids) == 10


def test_a_lone_surrogate_is_refused(byte_level: Path) -> None:
    with pytest.raises(InvalidField, match="lone surrogates"):
        cached(byte_level).encode("a\ud800")


@pytest.mark.parametrize(
    ("config", "special_map", "bos", "eos"),
    [
        ({"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}, {}, 1, (2,)),
        ({"bos_token": None, "eos_token": "</s>"}, {"bos_token": "<s>"}, 1, (2,)),
        ({"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": None, "eos_token": "ab"}, None, (265,)),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"bos_token": "<s>", "eos_token": "ab"}, None, (2,)),
        ({}, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}, 1, (2,)),
        ({"bos_token": "", "eos_token": "</s>"}, {}, None, (2,)),
        ({}, {}, None, ()),
    ],
)
def test_special_tokens_map_precedes_tokenizer_config_without_added_tokens(
    tmp_path: Path, config: dict[str, object], special_map: object, bos: int | None, eos: tuple[int, ...]
) -> None:
    saved(sentencepiece_like(), tmp_path, config)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, eos)
    library = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert (library.bos_token_id, library.eos_token_id) == (bos, eos[0] if eos else None)


@pytest.mark.parametrize("eos", ["</s>", "ab", None, "<absent>"])
def test_end_token_id_equals_that_of_the_loaded_tokenizer(tmp_path: Path, eos: str | None) -> None:
    path = saved(sentencepiece_like(), tmp_path, {} if eos is None else {"eos_token": eos})
    if eos == "<absent>":
        with pytest.raises(ModelError, match="is not in the vocabulary"):
            Tokenizer.load(path)
        assert end_token_id(path) is None
    else:
        tokenizer = Tokenizer.load(path)
        assert end_token_id(path) == next(iter(tokenizer.eos_ids), None)
        assert with_end_token((7,), path, tokenizer.vocab_size) == (7, *tokenizer.eos_ids)
        assert with_end_token(tokenizer.eos_ids, path, tokenizer.vocab_size) == tokenizer.eos_ids
        assert with_end_token((), path, 1) == ()
    (path / "tokenizer.json").write_text("{")
    assert end_token_id(path) is None


def test_eos_token_is_special_even_if_not_added_as_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(sentencepiece_like(), tmp_path, {"eos_token": "ab"}))
    assert tokenizer.eos_ids[0] in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.eos_ids) == ""


def test_tokens_only_in_added_tokens_decoder_are_added(tmp_path: Path) -> None:
    encoder = sentencepiece_like()
    size = encoder.get_vocab_size()
    entries = {
        str(size + 1): {"content": "<two>", "special": False},
        str(size): {"content": "<one>", "special": True},
    }
    saved(encoder, tmp_path, {"added_tokens_decoder": entries})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pieces[size:] == [b"<one>", b"<two>"]
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "</s>"},
        {"pad_token": {"content": "</s>", "rstrip": True, "__type": "AddedToken"}},
        {"added_tokens_decoder": {"265": {"content": "ab", "special": True}}},
        {"added_tokens_decoder": {"265": {"content": "ab", "rstrip": True, "normalized": False}}},
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True, "lstrip": True}}},
        {"extra_special_tokens": ["ab"]},
        {"additional_special_tokens": ["ab"]},
        {"extra_special_tokens": {"pair": "ab"}},
    ],
)
def test_configured_tokens_match_text_as_in_transformers(tmp_path: Path, config: dict[str, object]) -> None:
    encoder = sentencepiece_like()
    assert encoder.token_to_id("ab") == 265  # a token of the model, which tokenizer.json does not list as added
    encoder.add_special_tokens([AddedToken("</s>", rstrip=True)])
    tokenizer = Tokenizer.load(saved(encoder, tmp_path, config))
    library = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in ("a </s>  ab", "bab aab  </s> ab b", "aabb ab  a"):
        ids = library.encode(text)
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_special_tokens_of_the_map_alone_match_text_as_in_transformers(tmp_path: Path) -> None:
    saved(sentencepiece_like(), tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["ab"]}')
    expected = PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).encode("bab aab")
    assert Tokenizer.load(tmp_path).encode("bab aab") == expected


def test_added_token_with_an_unavailable_id_is_rejected(tmp_path: Path) -> None:
    saved(sentencepiece_like(), tmp_path, {"added_tokens_decoder": {"9999": {"content": "<far>"}}})
    with pytest.raises(ModelError, match=r"'<far>' cannot be given id 9999"):
        Tokenizer.load(tmp_path)


def test_eos_token_outside_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    saved(sentencepiece_like(), tmp_path, {"eos_token": "<nowhere>"})
    with pytest.raises(ModelError, match="eos_token '<nowhere>' is not in the vocabulary"):
        Tokenizer.load(tmp_path)


def test_directory_without_tokenizer_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ['{"decoder": ', '{"decoder":' * 100_000], ids=["cut", "deep"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    saved(sentencepiece_like(), tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Replace(tokenizers.Regex("a+"), " "), "Regex"),
    ],
)
def test_unsupported_decoder_is_named(tmp_path: Path, decoder: decoders.Decoder | None, named: str) -> None:
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        encoder.decoder = decoder
    with pytest.raises(ModelError, match=named):
        Tokenizer.load(saved(encoder, tmp_path))


def test_an_added_token_outside_of_the_byte_alphabet_is_its_own_text(tmp_path: Path) -> None:
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(" x"), AddedToken("日"), AddedToken("\xa0y")])
    tokenizer = Tokenizer.load(saved(encoder, tmp_path))
    assert tokenizer.pieces == [b"a", b" x", "日".encode(), "\xa0y".encode()]
    assert tokenizer.decode([0, 1, 2, 3]) == encoder.decode([0, 1, 2, 3])


def test_importing_tok_core_text_loads_no_torch() -> None:
    code = "import sys, tok_core.text, tok_core.manager.stops; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
