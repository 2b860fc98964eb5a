"""The page `regard explore`: a local server between a browser and `regard.explore.inside`.

    listen      the socket, and which requests are accepted: from this machine and page, with its token, at most 1 MB
    app         the routes
    analysis    the routes of flow, generation, lens, attribution, patching, neurons and embeddings
    questions   what a request holds
    models      the models that the page shows, those in memory, and the latest looks
    responses   what a response holds

What the browser draws is in `web`, at the top of the repository; its build is in `regard.explore.page`.
"""
