"""The parts of the trainer, floor by floor.

9  lm.plan                                       a command: the memory of a step of the run
9  lm.__main__                                   the list of commands
8  fsdp.py                                       the run, top to bottom
8  lm.search                                     a command: many runs
7  lm.preflight                                  what a run is, decided once
6  lm.generate, lm.prepare, lm.report            commands
6  lm.evaluate                                   another: the score of tasks
6  lm.memory                                     whether the ranks have room for what a run keeps
6  lm.resume                                     which checkpoint a run resumes from
6  lm.start                                      what precedes the import of PyTorch
6  lm.inputs                                     what the result of a run depends on
6  lm.initial_weights                            what `init_from` names
5  lm.config, lm.hf                              all hyperparameters; Hugging Face models
4  lm.checkpoint, lm.tasks                       save, verify, retain; benchmarks
4  lm.objectives                                 what is minimized: next token, preferences
4  lm.flops                                      what a token computes
3  lm.training, lm.metrics, lm.data              what a step is made of
3  lm.sampling                                   text from a model
2  lm.transformers_model                         models of transformers, as model.py's
2  lm.runtime                                    the ranks, the run's directory
1  model.py, lm.determined                       the model; the master
1  lm.storage                                    complete folders, locks, buckets, the cache
1  lm.transformers_attention                     attention of classes of transformers
1  lm.context                                    the tokens of sequences, divided among ranks
1  lm.transformers_config, lm.command_line       a model of transformers; arguments of fsdp.py
0  lm.transformers_private                       what of transformers has no public name
0  lm.attention, lm.delta_rule                   attention inside of documents, and linear attention
0  lm.launch, lm.seeds, lm.shards, lm.fileio     import of ours only what follows
0  lm.model_config, lm.strict_yaml, lm.units, lm.grouped_mm, lm.program
   lm.errors, lm.fields, lm.presets, lm.examined  import nothing of ours

Imports go down only, and parts on one floor do not import each other. A name is a module or a
package. Inside a package, files import each other in one direction.
"""

import sys

from lm.launch.requirements import check_requirements, excepthook

check_requirements()
if sys.argv[0] == "-m" or sys.argv[0].endswith("fsdp.py"):  # a command, and not a notebook
    sys.excepthook = excepthook
