"""The viewer: a web application over trajectory files and running environments. README.md describes its parts."""
