"""Parts of the trainer, floor by floor: a file imports only from lower floors, siblings never meet.

5  fsdp.py, generate, prepare, hf                         commands: they introduce parts to each other
4  config                                                 all parts' settings as one flat mapping
3  data.loader, data.workers, data.writer                 batches, by rank; token files
2  parallelize, checkpoint, hub, data.tokens, data.text, data.jsonl, data.stream, data.documents, metrics, profiling
1  precision, optim, mesh, stop, watch, folder, manifest, experiment, sampling, cluster, families
1  data.files, data.order, data.rows, data.tokenizer
0  model.py, launch, seeds, disk, data.words, errors      import nothing of ours, errors excepted
"""
