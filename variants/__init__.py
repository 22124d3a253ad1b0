"""The other adapters of the paper's tables, and our additions."""
