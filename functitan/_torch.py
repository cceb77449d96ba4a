"""The one place where private or unstable torch APIs are imported, so that a torch upgrade is one file's work."""
