# Determined sources this file in every container before the trial starts. If a package of requirements.txt is missing
# or too old, it installs the versions of constraints.txt. PyTorch and its dependencies stay the image's, and Determined
# stays the master's: the platform installs its own version first.
{ set +x; } 2>/dev/null
export LOGLEVEL="${LOGLEVEL:-ERROR}" # torchrun's: no banner about OMP_NUM_THREADS, which fsdp.py sets itself
python3 -c '
import importlib.metadata, re, sys
for line in open("requirements.txt"):
    name, oldest = re.fullmatch(r"([\w-]+)(?:[>=]=(.*))?", line.strip()).groups()
    found = importlib.metadata.version(name)
    if oldest and [int(n) for n in re.findall(r"\d+", found)] < [int(n) for n in re.findall(r"\d+", oldest)]:
        sys.exit(1)
' 2>/dev/null || {
  grep -v -e '^torch\b' -e '^determined\b' requirements.txt >/tmp/requirements.txt
  grep -v -e '^torch==' -e '^determined==' constraints.txt >/tmp/constraints.txt
  PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m pip install --quiet \
    --requirement /tmp/requirements.txt --constraint /tmp/constraints.txt
}
