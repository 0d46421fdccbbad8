"""Regular expressions as grammars and automata."""
