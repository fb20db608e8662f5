"""``blobstore completion``: prints a script for the completion of words in a shell."""

from __future__ import annotations

from typing import Any, Literal, get_args

import click

from blobstore.cli import output

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = get_args(Shell)

# Unlike click's script, it asks for the word as the user sees it: bash ends words at colons, which names of
# models contain. Text before the last colon is removed again, because bash keeps it. Characters that the
# shell would interpret are quoted, unless the user has begun with a quote. Then names that could end the quoted
# text, or are interpreted in it, are left out: they are names of tensors, too, which come from files.
_BASH = r"""%(complete_func)s() {
    local IFS=$'\n' line=${COMP_LINE:0:COMP_POINT} before words type value
    local word=${line##*[[:space:]]}
    IFS=$' \t\n' read -ra words <<< "$line"
    local count=$(( ${#words[@]} - (${#word} > 0) ))
    [[ $COMP_WORDBREAKS == *:* ]] && before=${word%%"${word##*:}"}
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                if [[ $word != [\'\"]* ]]; then
                    printf -v value %%q "$value"
                elif [[ $value == *[\'\"\\\$\`!]* ]]; then
                    continue
                fi
                COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(COMP_WORDS=$line COMP_CWORD=$count %(complete_var)s=bash_complete "$1")
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@click.command("completion", short_help="Print a script that completes words in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: Shell) -> None:
    """Print a script with which SHELL completes commands, options, paths, and names.

    Completed names are those of models in the store, of their tensors, and of types, and the remotes
    that models were pushed to and pulled from. For bash or zsh, add this line to ~/.bashrc or ~/.zshrc: eval "$(blobstore completion bash)". For fish:
    blobstore completion fish | source.
    """
    output.show(completion_script(shell))


def completion_script(shell: Shell) -> str:
    """Return the script of a shell, which may be evaluated, or installed as the file of the command."""
    from click.shell_completion import get_completion_class

    completer: Any = get_completion_class(shell)
    script = completer(click.Command("blobstore"), {}, "blobstore", "_BLOBSTORE_COMPLETE")
    return _BASH % script.source_vars() if shell == "bash" else str(script.source())
