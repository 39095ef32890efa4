"""What a trained model loses with stored rows."""
