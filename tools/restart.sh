#!/usr/bin/env bash
# Run a command, and again after each failure, as long as the run folder has a newer checkpoint than at its last start. So
# a lost rank costs the steps since the last checkpoint, and a mistake in the settings or a NaN ends the run.
#
#     bash tools/restart.sh out/node torchrun --standalone --nproc_per_node=8 train.py configs/node.py --resume
#
# To stop the run: touch out/node/stop, or Ctrl-C.
if [ $# -lt 2 ]; then
    echo "restart.sh: got $*: want the run folder and a command, bash tools/restart.sh out/node torchrun ..." >&2
    exit 2
fi
out=$1
shift
newest() { ls "$out/ckpt" 2> /dev/null | grep -x 'step-[0-9]*' | tail -n 1; }

trap 'exit 130' INT TERM                                # once the command has ended
until before=$(newest); "$@"; do
    code=$?
    [ "$(newest)" != "$before" ] || exit $code
    echo "restart.sh: ended with code $code, and $(newest) is new: starting again" >&2
done
