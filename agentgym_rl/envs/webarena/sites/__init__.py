"""Small sites in the manner of WebArena's: a shop, its administration, a forum and a place for code.

They are for tests and a first try: plain HTML from this process on the loopback interface, no files from elsewhere.
Every visitor (a cookie) has a copy of the data, so that what one changes no other sees.
"""
