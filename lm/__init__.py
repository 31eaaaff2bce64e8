"""Parts of the trainer, floor by floor: a file imports only from lower floors, siblings never meet.

5  fsdp.py, generate                                      commands: they introduce parts to each other
4  config                                                 all parts' settings as one flat mapping
3  data.loader                                            batches, by rank
2  parallelize, checkpoint, data.tokens, data.text, metrics, profiling
1  precision, optim, mesh, stop, watch, folder, manifest, experiment, sampling
0  model.py, launch, seeds, errors                        import nothing of ours, errors excepted
"""
