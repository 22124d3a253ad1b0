"""What the paper compares with, or we add. Importing a module of it makes its kinds known."""
