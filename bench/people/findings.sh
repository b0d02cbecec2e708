# What first_hour.py types. `t` shows a command and runs it; a line that does not begin with t is not shown.
t() { printf '$ %s\n' "$1"; eval "$1" 2>&1; local status=$?; [ $status = 0 ] || echo "[exit status $status]"; }
# In a terminal of 80 columns.
tt() { printf '$ %s\n' "$1"; script -qec "stty cols 80; $1" /dev/null; }
ready() { for i in $(seq 150); do rgpu nodes --pool $1 2>/dev/null | grep -q "$2" && return; sleep 0.2; done; echo "[$2 did not come]"; }
host() { RGPU_REGISTRY=etcd://$ETCD/pool rgpu server --host $1 --device cpu --pool $2 --lease 4 >$2.log 2>&1 & }
three() { rgpu up --nodes 3 --device cpu --lease 4 --detach --pool pool >/dev/null 2>&1; export RGPU_POOL=$PWD/pool; }
# A pool of two hosts with a folder each, on etcd: node-a made it, node-b joined.
two() {
  rgpu keys init --pool a >/dev/null; host node-a a; first=$!; ready a node-a
  RGPU_JOIN=$(rgpu keys invite --host node-b --pool a -o json | grep -o 'rgpu-join-[A-Za-z0-9_=-]*') host node-b b
  ready a node-b
  for i in $(seq 100); do [ -e b/pool.json ] && break; sleep 0.2; done; sleep 2; }
heat() { cat > train.py <<END
import sys
sys.argv = ['train.py', '--steps', '${1:-40}']
exec(compile(open('$(dirname $(command -v rgpu))/../../examples/heat.py').read(), 'heat.py', 'exec'))
END
}

## 1 The pool is not lost with its first host
# test: tests/scenarios/pool/test_first_host.py::test_the_first_host_is_destroyed
# test: tests/scenarios/pages/test_pages.py::test_the_first_hour_and_the_loss_of_the_first_host
two
t 'rgpu nodes --pool a'
t 'kill -9 $first'
sleep 8
t 'rgpu nodes --pool a'

## 2 No second pool beside the first
# test: tests/scenarios/pool/test_first_host.py::test_no_host_starts_into_another_pool
two
kill -9 $first; sleep 6
t 'rgpu server --host node-a --device cpu --pool a --lease 4 >again.log 2>&1 &'
sleep 8
t 'rgpu doctor --pool a 2>&1 | grep -iE "registry|pool"'
t 'rgpu pool status --pool a | head -3'
t 'timeout 10 rgpu server --host node-c --device cpu --pool b --registry etcd://$ETCD/other | tail -2 | cut -c1-400'

## 3 A machine without a GPU, and a pool elsewhere
# test: tests/scenarios/pages/test_pages.py::test_the_first_hour_and_the_loss_of_the_first_host
# test: tests/scenarios/pool/test_login.py::test_one_word_joins_a_machine
three; heat; mkdir laptop
word=$(rgpu keys invite --user anna -o json 2>/dev/null | grep -o 'rgpu-join-[A-Za-z0-9_=-]*')
t 'rgpu keys invite --user anna >/dev/null'
unset RGPU_POOL; export HOME=$PWD/laptop XDG_CONFIG_HOME=$PWD/laptop
t 'rgpu login ${word:-rgpu-join-…}'
t 'rgpu run -- python train.py'

## 4 What cannot run is not started
# test: tests/scenarios/people/test_starts.py::test_what_cannot_be_placed_is_not_started
three; heat
t 'rgpu run --memory 1TB -- python train.py'
t 'rgpu run --host node-x -- python train.py'
t 'rgpu run --gpu-model H900 -- python train.py'

## 5 Out of memory by quota
# test: tests/scenarios/people/test_starts.py::test_out_of_quota_is_one_line_with_what_to_do
three
cat > alloc.py <<END
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
print("cuMemAlloc:", driver.cuMemAlloc(512 << 20)[0].name)
END
t 'rgpu run --memory 256MiB -- python alloc.py'

## 6 Tables at 80 columns
# test: tests/cli/tables/test_golden_tables.py
three; heat 4000000
rgpu run --name resnet50-imagenet-bs256-seed-1234 --host node-a -- python train.py >/dev/null 2>&1 & sleep 9
tt 'rgpu ps'
tt 'rgpu nodes'
t 'rgpu ps | cat'

## 7 Dead hosts and ended sessions
# test: tests/scenarios/people/test_lost_hosts.py::test_a_lost_leader_stays_on_the_list_until_it_is_removed
# test: tests/scenarios/people/test_starts.py::test_ended_sessions_say_how_when_and_why
two; heat; cp a/keys/user.key a/keys/operator.key b/keys; export RGPU_POOL=$PWD/b
rgpu run --name trained -- python train.py >/dev/null 2>&1
kill -9 $first; sleep 9
t 'rgpu nodes'
t 'rgpu doctor | grep -v ^ok'
t 'rgpu history'
t 'rgpu ps --all'

## 8 Errors that said nothing, and deeds without a question
# test: tests/cli/test_asking.py::test_a_folder_that_cannot_be_read_is_one_line
# test: tests/scenarios/people/test_operator.py::test_a_wrong_device_is_told_and_no_error_of_an_earlier_run
# test: tests/scenarios/people/test_operator.py::test_a_revoked_key_is_let_in_by_no_node_when_the_verb_returns
# test: tests/scenarios/people/test_operator.py::test_a_move_says_who_asked_and_what_the_registry_did_not_take
# test: tests/cli/test_asking.py::test_down_purge_says_what_it_deletes_and_needs_a_yes
# test: tests/cli/test_asking.py::test_plots_are_refused_before_the_work
three; heat 4000000
t 'setpriv --reuid=65534 --clear-groups $(command -v rgpu) ps --pool $PWD/pool'
rgpu run --name moved --host node-a -- python train.py >/dev/null 2>&1 & sleep 9
t 'rgpu migrate moved node-b'
t 'rgpu history moved'
t 'rgpu keys list'
t 'rgpu keys revoke operator </dev/null'
t 'rgpu up --device cuda:9 --pool other --detach'
t 'rgpu up --device gpu0 --pool other --detach'
t 'rgpu down --purge </dev/null'
t 'ls pool'

## 9 An API, detached runs, output, labels, utilisation
# test: tests/scenarios/people/test_api.py
# test: tests/scenarios/people/test_detached.py
# test: tests/scenarios/people/test_lost_hosts.py::test_devices_say_how_busy_they_are
three; heat 400000
t 'python -c "import rgpu; print([name for name in dir(rgpu) if name[0] != chr(95)])"'
t 'rgpu run --detach --name train --label team=vision -- python train.py'
sleep 6
t 'rgpu logs train -n 2'
t 'rgpu ps -o wide | cut -c1-200'
t 'rgpu ps --label team=vision'
t 'rgpu nodes -o wide | cut -c1-200'
t 'rgpu signal train TERM; rgpu wait train'
