"""What a user asks for: one package per family of commands, one module per command.

Operations are the only place that combines the other packages, starts thread pools and reports
progress through callbacks. They never print and never exit.
"""
