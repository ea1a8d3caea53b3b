"""How the user is told: logger, warnings, tables and tracebacks. What an error says stands where it is raised.

- ``table``: rows of cells to an aligned text table.
- ``messages``: lines of the package's logger, and warnings that point to the user's line.
- ``names``: spellings of a name, and the nearest name to a wrong one.
- ``wording``: how messages speak of what a user has never seen.
- ``tracebacks``: without the machinery.
- ``own_faults``: errors that are this package's own.
"""
