"""The parts of the trainer, floor by floor: imports go down only, and parts on one floor do not import each other.

7  fsdp.py                                       the run, top to bottom
6  lm.preflight                                  what a run needs
5  lm.plan, lm.generate, lm.prepare, lm.report, lm.resume   commands; which checkpoint a run resumes from
4  lm.config, lm.hf                              all hyperparameters; Hugging Face models in and out
3  lm.checkpoint                                 save, verify, retain
2  lm.training, lm.metrics, lm.data              what a step is made of
1  lm.sampling, lm.runtime, lm.determined        text from a model; the ranks of a run; the Determined master
0  model.py, lm.launch, lm.seeds, lm.shards, lm.fileio, lm.strict_yaml   import only lm.errors and lm.fields of ours

A name is a module or a package. Inside a package, files import each other in one direction.
"""
