"""The page `regard explore`: a local server between a browser and `regard.explore.inside`.

    app         the routes
    guard       which requests are accepted: from this machine and page, with its token, at most 1 MB
    models      the models that the page shows, those in memory, and the latest looks
    responses   what a response holds
    frame       responses as bytes: a JSON header and the arrays it names
    tree        the search tree of a beam search
    listen      the socket

What the browser draws is in `web`, at the top of the repository; its build is in `regard.explore.page`.
"""
