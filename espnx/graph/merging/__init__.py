"""Changes of a graph as they are written: its writer, and their merge into its pages."""
