"""The page `regard explore`: a local server between a browser and `regard.explore.inside`.

    frame    answers as bytes: a JSON header and the arrays it names
    guard    who may ask: this machine, this page, with its token; nothing larger than 1 MB
    shelf    which runs there are, which are open, what was looked at last
    tree     beam search, written down as it goes
    app      the addresses, and what each one answers

What the browser draws is in `web`, at the top of the repository; its build is in `regard.explore.page`.
"""
