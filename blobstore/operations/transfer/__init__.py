"""Models sent to remotes and fetched from them: push, pull, sync, verification, lock files."""
