"""Follow the grammars of guided sequences and provide their token masks."""
