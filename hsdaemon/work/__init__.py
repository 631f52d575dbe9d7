"""The extraction worker: admission, requests, checks, publication, progress.

`decide` and `admission` choose, `checks` judge, `client` and `finder` speak to the engine, `writers` to the disk,
`worker` has the row's way from claim to commit, `start` what comes before the first request.
"""
