# Sourced by Determined in every container before the trial starts: brings what its image lacks.
# The image's own PyTorch stays: constraints.txt is not used, and the line for torch is left out.
grep -v '^torch' requirements.txt | python3 -m pip install --quiet --requirement /dev/stdin
