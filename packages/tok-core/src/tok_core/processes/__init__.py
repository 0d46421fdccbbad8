"""How manager, worker and engine run: as threads of one process, or as supervised processes of their own."""
