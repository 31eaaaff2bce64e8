"""The parts of the trainer, floor by floor.

11  lm.plan                                     a command: the memory of a step of the run
11  lm.__main__                                 the list of commands
10  fsdp.py                                     the run, top to bottom
10  lm.search                                   a command: many runs
 9  lm.preflight                                what a run is, decided once
 8  lm.generate, lm.prepare, lm.report          commands
 8  lm.evaluate                                 another: the score of tasks
 8  lm.memory                                   whether the ranks have room for what a run keeps
 8  lm.resume                                   which checkpoint a run resumes from
 8  lm.start                                    what precedes the import of PyTorch
 8  lm.inputs                                   what the result of a run depends on
 8  lm.initial_weights                          what `init_from` names
 7  lm.config, lm.hf                            all hyperparameters; Hugging Face models
 6  lm.checkpoint, lm.tasks                     save, verify, retain; benchmarks
 6  lm.objectives                               what is minimized: next token, preferences
 6  lm.flops                                    what a token computes
 5  lm.training, lm.metrics, lm.data            what a step is made of
 5  lm.sampling                                 text from a model
 4  lm.any_model                                a model of model.py or of transformers
 3  lm.transformers_model                       models of transformers, as model.py's
 2  lm.transformers_linear                      linear attention of classes of transformers
 2  lm.runtime                                  the ranks, the run's directory
 1  model.py, lm.determined                     the model; the master
 1  lm.storage                                  complete folders, locks, buckets, the cache
 1  lm.transformers_attention                   attention of classes of transformers
 1  lm.context                                  the tokens of sequences, divided among ranks
 1  lm.transformers_config, lm.command_line     a model of transformers; arguments of fsdp.py
 0  lm.transformers_private                     what of transformers has no public name
 0  lm.attention, lm.delta_rule                 attention inside of documents, and linear attention
 0  lm.launch, lm.seeds, lm.shards, lm.fileio   import of ours only what follows
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
