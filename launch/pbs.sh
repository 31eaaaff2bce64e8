#!/usr/bin/env bash
# A run under PBS, with the mpiexec of HPE Cray's PALS, of MPICH or Intel MPI (Hydra), or of Open MPI; from the folder
# of fsdp.py:
#
#   qsub -v ARGS="--config recipes/quickstart.yaml max_steps=1000" launch/pbs.sh
#   qsub -v ARGS="--config config.yaml",TOTAL_BATCH_SIZE=512,BATCH_SIZE=8 launch/pbs.sh
#
# Nodes, time, project and queue are the lines that begin with #PBS: change them here, because what is given to qsub itself
# does not reach the job's successors. A run that needs more than one time slot goes on by itself: it is told to stop
# before the limit and saves, and the job hands in its successor, as it does after a failure, for as long as every start
# leaves a new checkpoint.

#PBS -N fsdp
#PBS -l select=1:ncpus=64:ngpus=4:mpiprocs=4:ompthreads=16
#PBS -l walltime=06:00:00
##PBS -A project
##PBS -q queue
#PBS -j oe

set -u
lead=300 # seconds before the limit: enough for one step, one validation and one save

if [[ "${1:-}" == rank ]]; then # what mpiexec starts, on every machine
  [[ $# -ge 7 ]] || exit 2
  cd "$2" || exit 2
  export PBS_JOBID="$5" MASTER_ADDR="$6" # Open MPI does not pass on the environment
  export OMP_NUM_THREADS="$7"            # without it, every rank takes all cores
  export PYTHONUNBUFFERED=1              # a killed rank's last words reach the log
  # export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0 # where machines have several networks, or names that lead to 127.0.x.x
  # export NCCL_DEBUG=INFO                                 # what NCCL found and chose
  # export HF_HUB_OFFLINE=1 HF_HOME=/shared/huggingface    # compute nodes without a way out: download on the login node
  # export MASTER_PORT=29500                               # else it follows from the job's number
  trap "" USR2                                      # until Python listens, which takes a while
  [[ "$(uname --nodename)" != "$4" ]] || : >"$3/$$" # on the first machine: whom to tell
  rank="${PALS_RANKID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-?}}}"
  exec "${@:8}" > >(exec sed --unbuffered "s/^/$rank: /") 2>&1
fi

cd "$PBS_O_WORKDIR" || exit 2
read -r -d '' -a arguments <<<"${ARGS:-}" || true # words, that no shell looks at
for key in total_batch_size batch_size; do # from the environment, unless given as arguments
  variable="${key^^}"
  [[ -z "${!variable:-}" || " ${arguments[*]} " == *" $key="* ]] || arguments+=("$key=${!variable}")
done
python="${PYTHON:-.venv/bin/python}"
mpiexec="${MPIEXEC:-mpiexec}"
log="pbs-${PBS_JOBID%%.*}.log" # one file per job; lines begin with their rank

size="$(wc --lines <"$PBS_NODEFILE")"
per_node=$((size / $(sort --unique "$PBS_NODEFILE" | wc --lines)))
threads="${OMP_NUM_THREADS:-$((${NCPUS:-1} / per_node))}"
place=(-ppn "$per_node")
if "$mpiexec" --version 2>&1 | grep --quiet --extended-regexp "Open MPI|OpenRTE"; then
  place=(--map-by "ppr:$per_node:node")
fi

ranks="$(mktemp -d)"
told="" cancelled=""
# To the ranks of this machine themselves, because every mpiexec does something else with signals; one would do.
tell() { for rank in "$ranks"/*; do kill -USR2 "${rank##*/}" 2>/dev/null; done; }
trap 'told=1' USR2
trap 'cancelled=1' TERM
# shellcheck disable=SC2086 # options, several
"$mpiexec" -n "$size" "${place[@]}" ${MPIEXEC_OPTIONS:-} bash "$PBS_O_WORKDIR/launch/pbs.sh" \
  rank "$PBS_O_WORKDIR" "$ranks" "$(uname --nodename)" "$PBS_JOBID" "$(head --lines=1 "$PBS_NODEFILE")" \
  "$((threads > 0 ? threads : 1))" "$python" fsdp.py "${arguments[@]}" >"$log" 2>&1 &
step=$!
( # tells this shell before the limit
  trap 'kill $!; exit' TERM
  IFS=: read -r hours minutes seconds < <(qstat -f "$PBS_JOBID" | sed --quiet 's/^ *Resource_List.walltime = //p')
  if [[ -z "${seconds:-}" ]]; then
    echo "job $PBS_JOBID: qstat gives no walltime, so the run will not be told to stop before its limit" >&2
    exit
  fi
  seconds=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds - lead))
  sleep "$((seconds > 0 ? seconds : 0))" &
  wait $! && kill -USR2 $$
) &
limit=$!
while kill -0 "$step" 2>/dev/null; do
  [[ -z "$told$cancelled" ]] || tell # again and again: ranks that are starting do not listen yet
  sleep 1
done
wait "$step"
code=$?
kill "$limit" 2>/dev/null
rm --recursive "$ranks"

said() { grep --quiet --extended-regexp "^0: $1" "$log"; }
# 2: bad configuration or input, the same at the next start.
[[ -z "$cancelled" && $code -ne 2 ]] || exit "$code"
if [[ $code -eq 0 ]]; then
  [[ -n "$told" ]] && said "stopped behind step" || exit 0
fi
if ! said "checkpoint  step"; then
  echo "job $PBS_JOBID: no new checkpoint since its start, so it has no successor; a start needs time for one" \
    "(walltime, checkpoint_rate)" >>"$log"
  exit "$((code ? code : 1))"
fi
export ARGS="${ARGS:-} resume=auto" # what else it said of resuming was for the first job
passed_on=ARGS
for variable in TOTAL_BATCH_SIZE BATCH_SIZE PYTHON MPIEXEC MPIEXEC_OPTIONS; do
  [[ -z "${!variable+x}" ]] || passed_on+=",$variable"
done
successor="$(qsub -v "$passed_on" launch/pbs.sh)" || exit 1
echo "job $PBS_JOBID: goes on as $successor (exit code $code)" >>"$log"
