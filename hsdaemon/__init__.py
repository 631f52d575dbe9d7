"""hsdaemon: unattended extraction of hidden states for EAGLE-3 training.

Core decides, machine touches, data remembers, work extracts, the root wires.

    seen = observe(ports, config)           failures are values, unknown is a value too
    plan = safety.veto(decide(config, seen), config, seen)
    record, act, and say one sentence

room        what it is for
errors      one base; Transient (the next try may cure it), Fatal (a person must); the exit code on the class
config      every setting as one frozen tree, each with its unit, default and reason
core        pure decisions: nouns, reasons, ladder, safety, budgets
machine     what we ask of a host: ports, one adapter each; every fsync of the product (disk)
data        data set, manifest, formats, publication, verification, adoption
engine      SGLang without importing it: releases as data, argument line, environment, patches
wire        what capture and worker must agree on
capture     runs inside the engine: gather, copy, write, attest; inert without our environment
work        the worker: admission, requests, checks, progress; the proof of an engine
history     what was seen and done, this boot and before
observe     ask every port once, under deadlines
act         one function per action: the only code that changes the host
loop        tick and run
host        this host's ports wired together; status board, wishes, the report after a crash, metrics
cli         one file per verb
demo        the main job on an embedded default, with its own reference
"""

__version__ = "0.1.0"
