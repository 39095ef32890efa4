"""Tables and plots in documents, made from result files."""
