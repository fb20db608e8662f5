"""Signs models, and requires the signatures that a policy asks for."""
