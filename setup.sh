# Makes or reuses the virtual environment .venv with the packages of requirements.txt and enters it.
# To be sourced, by any POSIX shell, in the project's folder:  . ./setup.sh
{
    [ -x .venv/bin/pip ] || {
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer, please")' &&
            {
                python3 -m venv --clear .venv || {
                    echo "python3 comes without venv here: installing python3-venv"
                    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
                    $as_root apt-get update -q && $as_root apt-get install -yq python3-venv &&
                        python3 -m venv --clear .venv
                }
            }
    }
} && . .venv/bin/activate && {
    cmp -s requirements.txt .venv/installed.txt || {
        pip install -r requirements.txt && cp requirements.txt .venv/installed.txt
    }
}
