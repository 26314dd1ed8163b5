"""A drawing kit for HTML pages: markup, numbers, axes, charts, cells and a style sheet.

It knows nothing of plans or runs. Markup is ``markupsafe.Markup`` and text is ``str``: whatever is
not markup is escaped when it enters an element, exactly once.
"""
