"""What decodes: the models, and where each system keeps K and V."""
