"""Files, batches and answers on disk: SQLite and one file each, safe against any death of the process."""
