"""The command line: thin, one small module per verb family."""
