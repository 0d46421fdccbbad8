"""What each `tok` command does, a module a command; loaded only when its command is called."""
