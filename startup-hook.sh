# Determined sources this file in every container before the trial starts. It installs what the image lacks.
# The image's PyTorch is kept: torch is left out, and constraints.txt is not used.
grep -v '^torch' requirements.txt | python3 -m pip install --quiet --requirement /dev/stdin
