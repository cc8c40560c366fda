"""Train, compress, export, choose and package image classifiers; each stage publishes one artifact.

| stage    | reads    | does                                                      | publishes                         |
|----------|----------|-----------------------------------------------------------|-----------------------------------|
| train    | the data | multi-process DDP training under torchrun                 | the dense model                   |
| compress | train    | structured pruning with recovery training, row-wise int8  | the candidates, in PyTorch |
| export   | compress | PyTorch -> ONNX, parity on the whole validation split     | the candidates, in ONNX    |
| import   | `.onnx`  | with --onnx FILE, in place of the three: wrap, parity     | the candidates, in ONNX    |
| choose   | export   | measures accuracy, cost and bytes of each on this machine | the model to ship                 |
| package  | choose   | adds handler, labels and golden images | the `.mar`                        |

`python -m pipeline STAGE` makes a stage and everything before it that is not there yet. `verify` and `bench` are
commands, not stages: they look at what the stages made and publish nothing.
"""
