"""What every process needs: heartbeat, lifeline to its parent, log format, scratch directories, garbage collection."""
