"""The page's languages, a file of each: TEXTS are the page's own strings by key, SENTENCES those of
the rest of the program by their English templates.
"""
