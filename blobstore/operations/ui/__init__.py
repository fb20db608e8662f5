"""Web pages about models, as self-contained HTML."""
