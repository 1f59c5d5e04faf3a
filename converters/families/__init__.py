"""Built-in families."""
