"""The same task, reward and algorithm under other trainers; nothing here is needed by the native loops."""
