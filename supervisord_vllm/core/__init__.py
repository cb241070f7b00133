"""The pure half: it decides, and never touches a clock, a file, a process or a random number."""
