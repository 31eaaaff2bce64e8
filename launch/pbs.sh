#!/usr/bin/env bash
# Train under PBS with the mpiexec of HPE Cray (PALS), MPICH, Intel MPI (Hydra) or Open MPI. Submit from the directory of
# fsdp.py:
#
#   qsub -v ARGS="--config recipes/quickstart.yaml max_steps=1000" launch/pbs.sh
#   qsub -v ARGS="--config config.yaml",TOTAL_BATCH_SIZE=512,BATCH_SIZE=8 launch/pbs.sh
#
# Change nodes, walltime, project and queue in the #PBS lines below: options of qsub do not apply to the follow-up jobs. A
# run longer than the walltime resumes by itself: it is signaled before the limit, saves a checkpoint, and the job submits
# a follow-up job. It also submits one after a failure, as long as each job saves a new checkpoint.
#
# PYTHON is the command that runs fsdp.py, split into words at spaces. By default it is .venv/bin/python, which
# `make install` makes. With conda; in a container (not tried):
#
#   qsub -v ARGS="--config config.yaml",PYTHON="$HOME/miniconda3/envs/NAME/bin/python" launch/pbs.sh
#   qsub -v ARGS="--config config.yaml",PYTHON="apptainer exec --nv image.sif python3" launch/pbs.sh

#PBS -N fsdp
#PBS -l select=1:ncpus=64:ngpus=4:mpiprocs=4:ompthreads=16
#PBS -l walltime=06:00:00
##PBS -A project
##PBS -q queue
#PBS -j oe

# What a job needs besides PYTHON, on every node:
# module load cuda
# source "$HOME/miniconda3/bin/activate" NAME

set -u
lead=300 # seconds before the walltime limit, enough for one step, one validation and one checkpoint

if [[ "${1:-}" == rank ]]; then # started by mpiexec, once per rank
  [[ $# -ge 7 ]] || exit 2
  cd "$2" || exit 2
  export PBS_JOBID="$5" MASTER_ADDR="$6" # Open MPI does not forward the environment to other nodes
  export OMP_NUM_THREADS="$7"            # by default, each rank would use all cores
  export PYTHONUNBUFFERED=1              # a killed rank's output is in the log
  # export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0 # on nodes with several networks, or whose names resolve to 127.0.x.x
  # export NCCL_DEBUG=INFO                                 # NCCL's choice of network and topology
  # export HF_HUB_OFFLINE=1 HF_HOME=/shared/huggingface    # nodes without internet: download on the login node
  # export MASTER_PORT=29500                               # by default derived from the job ID
  trap "" USR2                                      # until Python installs its handler
  [[ "$(uname --nodename)" != "$4" ]] || : >"$3/$$" # process ID, for the signal from the first node
  rank="${PALS_RANKID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-?}}}"
  exec "${@:8}" > >(exec sed --unbuffered "s/^/$rank: /") 2>&1
fi

cd "$PBS_O_WORKDIR" || exit 2
read -r -d '' -a arguments <<<"${ARGS:-}" || true # split into words without expansions
for key in total_batch_size batch_size; do # from the environment, unless passed as arguments
  variable="${key^^}"
  [[ -z "${!variable:-}" || " ${arguments[*]} " == *" $key="* ]] || arguments+=("$key=${!variable}")
done
read -r -a python <<<"${PYTHON:-.venv/bin/python}"
mpiexec="${MPIEXEC:-mpiexec}"
log="pbs-${PBS_JOBID%%.*}.log" # one log per job; each line starts with the rank
if [[ ! -f fsdp.py ]]; then
  echo "fsdp.py: not in $PWD; submit from the directory of fsdp.py" >"$log"
  exit 2
fi
if ! command -v "${python[0]}" >/dev/null; then
  echo "PYTHON: ${python[0]} does not exist on $(uname --nodename); run \`make install\` in $PWD, or set PYTHON, e.g." \
    "qsub -v PYTHON=\$HOME/miniconda3/envs/NAME/bin/python,ARGS=..." >"$log"
  exit 2
fi

size="$(wc --lines <"$PBS_NODEFILE")"
per_node=$((size / $(sort --unique "$PBS_NODEFILE" | wc --lines)))
threads="${OMP_NUM_THREADS:-$((${NCPUS:-1} / per_node))}"
placement=(-ppn "$per_node")
if "$mpiexec" --version 2>&1 | grep --quiet --extended-regexp "Open MPI|OpenRTE"; then
  placement=(--map-by "ppr:$per_node:node")
fi

ranks="$(mktemp -d)"
signaled="" cancelled=""
# Signals go to the ranks on this node directly, because implementations of mpiexec handle signals differently. One rank
# is enough to stop all.
signal_ranks() { for rank in "$ranks"/*; do kill -USR2 "${rank##*/}" 2>/dev/null; done; }
trap 'signaled=1' USR2
trap 'cancelled=1' TERM
# shellcheck disable=SC2086 # MPIEXEC_OPTIONS may hold several options
"$mpiexec" -n "$size" "${placement[@]}" ${MPIEXEC_OPTIONS:-} bash "$PBS_O_WORKDIR/launch/pbs.sh" \
  rank "$PBS_O_WORKDIR" "$ranks" "$(uname --nodename)" "$PBS_JOBID" "$(head --lines=1 "$PBS_NODEFILE")" \
  "$((threads > 0 ? threads : 1))" "${python[@]}" fsdp.py "${arguments[@]}" >"$log" 2>&1 &
step=$!
( # signals this shell before the walltime limit
  trap 'kill $!; exit' TERM
  IFS=: read -r hours minutes seconds < <(qstat -f "$PBS_JOBID" | sed --quiet 's/^ *Resource_List.walltime = //p')
  if [[ -z "${seconds:-}" ]]; then
    echo "job $PBS_JOBID: qstat prints no walltime, so the run will not stop before the limit" >&2
    exit
  fi
  seconds=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds - lead))
  if [[ "$seconds" -le 0 ]]; then
    echo "job $PBS_JOBID: the run stops after its first step, because it stops $lead s (lead) before the walltime limit; increase walltime" >&2
    seconds=0
  fi
  sleep "$seconds" &
  wait $! && kill -USR2 $$
) &
limit=$!
while kill -0 "$step" 2>/dev/null; do
  [[ -z "$signaled$cancelled" ]] || signal_ranks # repeatedly: ranks ignore it until Python installs its handler
  sleep 1
done
wait "$step"
code=$?
kill "$limit" 2>/dev/null
rm --recursive "$ranks"

rank0_printed() { grep --quiet --extended-regexp "^0: $1" "$log"; }
# Exit code 2 (bad configuration or input) would be the same in a follow-up job.
[[ -z "$cancelled" && $code -ne 2 ]] || exit "$code"
if [[ $code -eq 0 ]]; then
  [[ -n "$signaled" ]] && rank0_printed "stopped after step" || exit 0
fi
if ! rank0_printed "checkpoint +step"; then
  echo "job $PBS_JOBID: no follow-up job: this job saved no checkpoint; increase walltime or lower checkpoint_rate" >>"$log"
  exit "$((code ? code : 1))"
fi
export ARGS="${ARGS:-} resume=auto" # any other value of resume was for the first job
exported=ARGS
for variable in TOTAL_BATCH_SIZE BATCH_SIZE PYTHON MPIEXEC MPIEXEC_OPTIONS; do
  [[ -z "${!variable+x}" ]] || exported+=",$variable"
done
next_job="$(qsub -v "$exported" launch/pbs.sh)" || exit 1
echo "job $PBS_JOBID: resumes as $next_job (exit code $code)" >>"$log"
