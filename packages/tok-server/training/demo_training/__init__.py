"""Train and evaluate the demo model that tok-server embeds: a small Llama on templated word problems."""
