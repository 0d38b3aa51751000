# Creates or reuses the virtual environment .venv with the packages of requirements.txt and enters
# it. Source it, in any POSIX shell:  . ./setup.sh
sidespin=.
if [ -n "${BASH_SOURCE:-}" ]; then
    sidespin=$(dirname "$BASH_SOURCE")
elif [ -n "${ZSH_VERSION:-}" ]; then
    eval 'sidespin=$(dirname "${(%):-%x}")'
fi
{
    [ -f "$sidespin/requirements.txt" ] || {
        echo "setup.sh: this shell cannot tell where setup.sh is; go to its folder first" >&2
        false
    }
} && {
    [ -x "$sidespin/.venv/bin/pip" ] || {
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sidespin needs Python 3.11 or newer")' &&
            {
                python3 -m venv --clear "$sidespin/.venv" || {
                    echo "python3 has no venv here: installing python3-venv"
                    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
                    $as_root apt-get update -q && $as_root apt-get install -yq python3-venv &&
                        python3 -m venv --clear "$sidespin/.venv"
                }
            }
    }
} && . "$sidespin/.venv/bin/activate" && {
    cmp -s "$sidespin/requirements.txt" "$sidespin/.venv/installed.txt" || {
        pip install -r "$sidespin/requirements.txt" &&
            cp "$sidespin/requirements.txt" "$sidespin/.venv/installed.txt"
    }
} && case $0 in
    *setup.sh) echo "Installed. To enter the environment, source this file:  . $sidespin/setup.sh" ;;
esac
