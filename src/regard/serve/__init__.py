"""`regard serve`: trained models as a service.

    HTTP request -> app (formats, keys, limits) -> Admission (a queue bounded in tokens) -> Batcher | Generations

The event loop reads and writes HTTP; every model computes in one thread of its own (`regard.serve.work`). Prompts of
language models share a continuous batch (`regard.predict.continuous`), everything else is computed in dynamic batches:
what waits when the model becomes free is computed together. Outputs are those of the commands (`regard translate`,
`regard generate` …), whatever else is being computed.
"""
