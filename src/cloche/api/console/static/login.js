// A link that logs in has its secret behind the #, which reaches no server's log and no proxy: it is posted from here.
const form = document.getElementById("login");
const secret = location.hash.slice(1);

async function goOnIfLoggedIn() {
  // A link on another site leads here although there is a session: its cookie was not sent along.
  const answer = await fetch("/ui/login/state", { cache: "no-store" });
  if ((await answer.json()).logged_in) location.replace(form.elements.next.value);
}

if (secret) {
  history.replaceState(null, "", location.pathname + location.search);
  form.elements.link.value = secret;
  form.submit();
} else if (!document.querySelector("[role=alert]")) {
  goOnIfLoggedIn();
  document.addEventListener("visibilitychange", goOnIfLoggedIn); // somebody may have logged in beside it
}
