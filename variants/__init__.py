"""The paper's baselines, and our additions. Importing a module registers its kinds."""
