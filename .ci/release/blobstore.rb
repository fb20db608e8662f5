# For a tap of Homebrew: `brew install --formula` takes this file. The digest is that which `nox -s build` prints.
class Blobstore < Formula
  desc "Content-addressed store for model weights"
  homepage "https://pypi.org/project/tensor-blobstore/"
  url "https://files.pythonhosted.org/packages/source/t/tensor-blobstore/tensor_blobstore-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000" # not published yet
  license all_of: ["Apache-2.0", "MIT"]

  depends_on "python@3.13"

  # pip installs the dependencies that the package names. A formula of homebrew-core needs a resource for each:
  # `brew update-python-resources`.
  def install
    system "python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "#{buildpath}[hub,registry,serve,sign]"
    bin.install_symlink libexec/"bin/blobstore"
    man1.install_symlink libexec.glob("share/man/man1/*.1")
    bash_completion.install_symlink libexec/"share/bash-completion/completions/blobstore"
    zsh_completion.install_symlink libexec/"share/zsh/site-functions/_blobstore"
    fish_completion.install_symlink libexec/"share/fish/vendor_completions.d/blobstore.fish"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/blobstore --version")
    system bin/"blobstore", "--store", testpath/"store", "list"
  end
end
