#!/usr/bin/env bash
# All that needs a GPU: tests, benchmarks and the sanitizer, into one JSON. Nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SANITIZERS=(memcheck initcheck synccheck racecheck)
ALL_STAGES=(build tests upload decode resident mxfp4 formats model memory "${SANITIZERS[@]}")

usage() {
    cat <<'END'
usage: bench/gpu.sh [--quick] [--only STAGE,...] [--python PYTHON] [--traces DIR] [--prebuilt]
                    [--limit SECONDS] [--budget SECONDS] [OUT.json]

Builds in place, runs `pytest -m gpu` and the measurements upload, decode, resident, mxfp4,
formats, model and memory of bench/gpu.py, then compute-sanitizer's memcheck, initcheck, synccheck
and racecheck over a short selection of the tests. Writes one JSON, by default
gpu-MACHINE-DATE.json in $OUT if that is set, else in bench/results, anew after every stage; logs go
to build/gpu, or into $OUT as one archive. A stage that fails or takes too long does not stop those
after it: it is interrupted (SIGINT), so that a measurement writes the ways that are done, and 20
seconds later it is killed. Ctrl-C, or SIGTERM, does the same to the stage that runs, and leaves
the others out.

  --quick           in 10 to 15 minutes, and a build: fewer runs, fewer layers, less to copy, no tests
                    that are marked nightly, and of the sanitizers memcheck alone
  --only STAGE,...  of: build tests upload decode resident mxfp4 formats model memory memcheck
                    initcheck synccheck racecheck
  --python PYTHON   by default python3
  --traces DIR      where recorded routing is (bigmoe-qwen.npz); without it, where the benchmarks
                    look, or drawn
  --prebuilt        do not build: take the extension modules that are there, whatever their age.
                    Without it they are built where one is missing or older than a source
  --limit SECONDS   the longest that any stage may take
  --budget SECONDS  the longest that all of it may take: each stage gets what is left at most, and
                    is left out where that is less than 30 seconds

Needs a GPU, CUDA's driver, and of Python: NumPy, CuPy, ml_dtypes, psutil, rich, pytest; Cython and
setuptools to build; torch, transformers, greenlet and hypothesis for the tests that use them, and
the first three for `model`, which writes 61 GB of files: into /dev/shm if there is room, else TMPDIR.

exit code: 0 all is well, 1 a stage failed or a bound does not hold, 2 nothing could be run, 130 it
was interrupted
END
}

quick=0
only=""
python=python3
out=""
traces=""
prebuilt=0
longest=""
budget=""
began=$(date +%s)
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --quick) quick=1 ;;
        --prebuilt) prebuilt=1 ;;
        --only | --python | --traces | --limit | --budget)
            if (($# < 2)); then
                echo "gpu.sh: $1 needs a value" >&2
                exit 2
            fi
            case "$1" in
                --only) only=$2 ;;
                --python) python=$2 ;;
                --traces) traces=$2 ;;
                --limit) longest=$2 ;;
                --budget) budget=$2 ;;
            esac
            shift
            ;;
        -*) echo "gpu.sh: unknown option $1; see --help" >&2; exit 2 ;;
        *)
            if [[ -n $out ]]; then
                echo "gpu.sh: more than one output: $out and $1" >&2
                exit 2
            fi
            out=$1
            ;;
    esac
    shift
done
if [[ -n $longest && ! $longest =~ ^[1-9][0-9]*$ ]]; then
    echo "gpu.sh: --limit $longest is no number of seconds" >&2
    exit 2
fi
if [[ -n $budget && ! $budget =~ ^[1-9][0-9]*$ ]]; then
    echo "gpu.sh: --budget $budget is no number of seconds" >&2
    exit 2
fi
if [[ -n $traces && ! -f $traces/bigmoe-qwen.npz ]]; then
    echo "gpu.sh: $traces has no bigmoe-qwen.npz; leave --traces out to use drawn routing" >&2
    exit 2
fi
stages=("${ALL_STAGES[@]}")
if ((quick)); then
    stages=(build tests upload decode resident mxfp4 formats model memory memcheck)
fi
if [[ -n $only ]]; then
    IFS=, read -r -a stages <<<"$only"
    for stage in "${stages[@]}"; do
        if [[ " ${ALL_STAGES[*]} " != *" $stage "* ]]; then
            echo "gpu.sh: unknown stage $stage; there are: ${ALL_STAGES[*]}" >&2
            exit 2
        fi
    done
fi

# Whether a package is there; many files ask for the same few.
declare -A there
has() {
    if [[ -z ${there[$1]-} ]]; then
        there[$1]=yes
        "$python" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$1') is None)" ||
            there[$1]=no
    fi
    [[ ${there[$1]} == yes ]]
}

# Whether each Cython source has a module for this Python that is newer than all sources.
is_built() {
    local suffix newest source module
    suffix=$("$python" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
    newest=$(find moecache -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' | xargs ls -t | head -n 1)
    while IFS= read -r source; do
        module=${source%.pyx}$suffix
        [[ -f $module ]] || return 1
        if ((!prebuilt)) && [[ $newest -nt $module ]]; then return 1; fi
    done < <(find moecache -name '*.pyx')
}

builds=0
if ((prebuilt)); then
    if ! is_built; then
        echo "gpu.sh: --prebuilt, but an extension module is missing: leave it out to build" >&2
        exit 2
    fi
elif [[ " ${stages[*]} " == *" build "* ]] && ! is_built; then
    builds=1
fi
missing=()
if ((builds)); then
    for package in Cython setuptools; do
        has "$package" || missing+=("$package")
    done
fi
for package in numpy cupy ml_dtypes psutil rich pytest; do
    has "$package" || missing+=("$package")
done
if ((${#missing[@]})); then
    echo "gpu.sh: $python lacks: ${missing[*]}" >&2
    exit 2
fi
if ! gpu=$("$python" -c "
import cupy
properties = cupy.cuda.runtime.getDeviceProperties(0)
print(properties['name'].decode())"); then
    echo "gpu.sh: CuPy finds no GPU; nvidia-smi must list one" >&2
    exit 2
fi

versions=$("$python" -c "
import importlib.metadata as m, platform, cupy
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return 'none'
runtime = cupy.cuda.runtime
print(platform.python_version(), runtime.runtimeGetVersion(), runtime.driverGetVersion(),
      cupy.__version__, *map(version, ('numpy', 'torch', 'transformers')))")
read -r python_version cuda_runtime cuda_driver cupy_version numpy_version torch_version \
    transformers_version <<<"$versions"
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null) ||
    driver=unknown
commit=$(git rev-parse HEAD 2>/dev/null) || commit=unknown
if [[ $commit != unknown && -n $(git status --porcelain --untracked-files=no) ]]; then
    commit+=" with changes"
fi
cpu=$(sed -n '/^model name/{s/^[^:]*: //p;q}' /proc/cpuinfo)
memory_kib=$(sed -n 's/MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo)
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
facts=(
    "gpu=$gpu" "driver=${driver:-unknown}" "cuda_runtime=$cuda_runtime" "cuda_driver=$cuda_driver"
    "cpu=${cpu:-unknown}, $(nproc) cores" "host_memory_kib=$memory_kib"
    "kernel=$(uname -r)" "python=$python_version" "cupy=$cupy_version" "numpy=$numpy_version"
    "torch=$torch_version" "transformers=$transformers_version" "commit=$commit" "date=$started"
    "quick=$quick"
)
printf '%s\n' "${facts[@]}"
if [[ -z $out ]]; then
    name=$(tr '[:upper:] ' '[:lower:]-' <<<"$gpu" | tr -cd '[:alnum:]-')
    suffix=""
    if ((quick)); then suffix=-quick; fi
    out=${OUT:-bench/results}/gpu-$name-${started%%T*}$suffix.json
fi

work=build/gpu
if [[ -n ${OUT-} ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
# Nothing of an earlier run may come into this one's report.
for stage in "${ALL_STAGES[@]}"; do rm -f "$work/$stage".{status,json,xml,log}; done
mkdir -p "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1

wanted() { [[ " ${stages[*]} " == *" $1 "* ]]; }

leave_out() {
    rm -f "$work/$1".{status,json,xml}
    echo "$2" | tee "$work/$1.log"
}

# Of the stages so far, so that there is one whatever becomes of the others.
write_report() {
    local report=("$python" bench/gpu.py report --work "$work" --out "$out") one
    for one in "${stages[@]}"; do report+=(--stage "$one"); done
    for one in "${facts[@]}"; do report+=(--fact "$one"); done
    if [[ -n ${OUT-} ]]; then tar -czf "$OUT/gpu-logs.tar.gz" -C "$work" .; fi
    "${report[@]}"
}

# The stage that runs, and whether the script was interrupted.
running=""
interrupted=0
interrupt() {
    interrupted=1
    if [[ -n $running ]]; then kill -INT "$running" 2>/dev/null || true; fi
}
trap interrupt INT TERM

# A stage that is interrupted has 20 seconds, and the reports take a few.
RESERVE=25
# run NAME SECONDS COMMAND...
run() {
    local name=$1 limit=$2 code=0 start end left
    if ((interrupted)); then
        leave_out "$name" "interrupted"
        return
    fi
    if [[ -n $budget ]]; then
        left=$((budget - ($(date +%s) - began) - RESERVE))
        if ((left < 5)); then
            leave_out "$name" "no time is left of $budget s"
            return
        fi
        if ((left < limit)); then limit=$left; fi
    fi
    shift 2
    rm -f "$work/$name".{status,json,xml}
    echo "== $name: $*"
    start=$(date +%s.%N)
    if [[ -n $longest ]] && ((longest < limit)); then limit=$longest; fi
    # In the background: bash heeds no signal before a command in the foreground ends.
    timeout --signal=INT --kill-after=20 "$limit" "$@" >"$work/$name.log" 2>&1 &
    running=$!
    if ((interrupted)); then interrupt; fi
    wait "$running" || code=$?
    # A signal ends `wait`, not the stage.
    while kill -0 "$running" 2>/dev/null; do
        code=0
        wait "$running" || code=$?
    done
    running=""
    end=$(date +%s.%N)
    tail -n 40 "$work/$name.log"
    echo "$code $(awk -v a="$start" -v b="$end" 'BEGIN { print b - a }') $limit" \
        >"$work/$name.status"
    write_report >/dev/null || true
}

# The project's own settings want plug-ins of pytest that may not be here, and warnings of
# libraries that they do not know are errors there.
cat >"$work/pytest.ini" <<END
[pytest]
addopts = --import-mode=importlib -ra -q -p no:cacheprovider
markers =
    gpu: needs a GPU that CuPy can use
    nightly: one more case of what other tests show
END
marks=gpu
if ((quick)); then marks="gpu and not nightly"; fi
pytest=("$python" -m pytest -c "$work/pytest.ini" --rootdir "$PWD" -m "$marks")

test_files=()
left_out=()
while IFS= read -r file; do
    lacks=""
    for package in hypothesis torch transformers safetensors; do
        if grep -qE "^(import|from) $package" "$file" && ! has "$package"; then
            lacks+=" $package"
        fi
    done
    if grep -q "transformers" "$file" && ! has greenlet; then lacks+=" greenlet"; fi
    if [[ -n $lacks ]]; then
        left_out+=("$file (no$lacks)")
    else
        test_files+=("$file")
    fi
done < <(grep -lwE 'gpu' tests/test_*.py)
for file in ${left_out[@]+"${left_out[@]}"}; do
    echo "left out: $file"
done
facts+=("tests_left_out=${left_out[*]-}")

declare -A limit options
if ((quick)); then
    limits=(300 240 70 70 100 100 90 240 30 180 180 180 180)
    options[upload]="--runs 5 --bytes 256MiB --copy-bytes 512MiB --look-ups 2000"
    options[decode]="--runs 5 --tokens 8 --layers 8 --copy-bytes 512MiB"
    options[resident]="--runs 10 --layers 8 --copy-bytes 512MiB"
    options[mxfp4]="--runs 10 --layers 8 --copy-bytes 512MiB"
    options[formats]="--runs 5 --layers 4 --copy-bytes 512MiB"
    options[model]="--runs 3"
    options[memory]="--evictions 20000 --rounds 10"
else
    # Sanitizers make a kernel up to a hundred times slower, and take a minute to begin.
    limits=(1200 1800 1200 2400 1200 1200 1200 1200 1200 3600 3600 3600 3600)
fi
# One launch, waves, cuBLAS, and ids that are wrong.
checked="weights_may_have or row_nan or wrong_id_on_the_host"
for i in "${!ALL_STAGES[@]}"; do
    limit[${ALL_STAGES[i]}]=${limits[i]}
done
if [[ -n $traces ]]; then
    for name in decode resident; do
        options[$name]+=" --trace $traces/bigmoe-qwen.npz"
    done
fi

if wanted build; then
    if ((builds)); then
        run build "${limit[build]}" "$python" setup.py -q build_ext --inplace -j "$(nproc)"
    else
        leave_out build "the extension modules are there"
    fi
fi
if wanted tests; then
    run tests "${limit[tests]}" "${pytest[@]}" --junitxml="$work/tests.xml" "${test_files[@]}"
fi
for name in upload decode resident mxfp4 formats model memory; do
    if wanted "$name"; then
        read -r -a chosen <<<"${options[$name]-}"
        run "$name" "${limit[$name]}" "$python" -m bench.gpu "$name" \
            --json "$work/$name.json" ${chosen[@]+"${chosen[@]}"}
    fi
done
sanitizer=$(command -v compute-sanitizer || true)
if [[ -z $sanitizer && -x /usr/local/cuda/bin/compute-sanitizer ]]; then
    sanitizer=/usr/local/cuda/bin/compute-sanitizer
fi
for tool in "${SANITIZERS[@]}"; do
    wanted "$tool" || continue
    if [[ -z $sanitizer ]]; then
        leave_out "$tool" "compute-sanitizer was not found"
    else
        run "$tool" "${limit[$tool]}" "$sanitizer" --tool "$tool" --error-exitcode 9 --report-api-errors no \
            "${pytest[@]}" --junitxml="$work/$tool.xml" -k "$checked" tests/test_cuda_experts.py
    fi
done

code=0
write_report || code=$?
if ((interrupted)); then code=130; fi
exit "$code"
