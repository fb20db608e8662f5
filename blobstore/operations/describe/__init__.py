"""The operations that describe what a store has: list, show, info, find, cat and du. They never print."""
