"""The hyperparameters, read from one flat mapping, validated, explained and documented.

In the order of `reading.read_hyperparameters`: `draft` is what is set and where, `model_defaults`
what `init_from` sets, `validation` is each key by itself and `combinations` all of them together.
`hyperparameters` says what there is, `wording` how messages and tables write it.
"""
